"""Show jobs, services and captures as a web page."""
