"""How far one arbitrator reaches: decision latency, ingest, CPU and memory from 32 workers to 10,000."""
