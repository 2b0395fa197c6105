"""Run broker and services on this machine until interrupted."""
