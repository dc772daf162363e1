"""torch.distributed.checkpoint (DCP): its planners, its metadata and its folders."""
