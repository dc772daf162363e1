"""Adapters to other libraries: torch.distributed.checkpoint, and safetensors folders."""
