"""List, show, export and import learned policies."""
