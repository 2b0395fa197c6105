"""Watch a job: batch sizes, times, throughput, accuracy, decisions."""
