"""The shard as a safetensors file: layout, header, metadata, views."""
