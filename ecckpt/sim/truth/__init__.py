"""What really exists in a simulated cluster, what was promised of it, and the checks of both."""
