"""What is really there, and what was promised: violations are found here."""
