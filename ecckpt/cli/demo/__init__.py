"""The demo: a small GPT that loses half of its nodes and trains on."""
