"""The operators' jobs: datastores, control and status of tailers."""
