"""How the ranks of a session meet, and how a rank sees the cluster."""
