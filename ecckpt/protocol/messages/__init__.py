"""Control messages: frozen dataclasses whose fields say what may be on the wire. Pure."""
