"""The shard as a safetensors file (docs/FORMAT.md): layout, header, metadata, views, catalog."""
