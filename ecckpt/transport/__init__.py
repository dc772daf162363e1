"""How bytes move between agents: peers only ever pull."""
