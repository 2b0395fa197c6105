"""The laboratory: virtual jobs under the services' own pure functions, in one process; learning and honest comparison."""
