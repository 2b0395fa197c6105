"""List, show and forget what the runs of job families taught."""
