"""The rules of placement, survival, roll-backs and retention. Pure functions of their arguments."""
