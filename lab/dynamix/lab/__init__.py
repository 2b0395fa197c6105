"""The laboratory: virtual jobs under the services' own pure functions; learning and honest comparison."""
