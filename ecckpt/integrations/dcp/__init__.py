"""torch.distributed.checkpoint: its planners, its metadata and its folders."""
