"""Control messages: frozen dataclasses whose annotations say what is valid on the wire. Pure."""
