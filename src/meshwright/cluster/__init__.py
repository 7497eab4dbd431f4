"""Where a job runs: devices, links and nodes, each figure with its source."""
