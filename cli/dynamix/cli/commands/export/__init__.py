"""Write a job or a capture as a table: Parquet, CSV or JSON lines."""
