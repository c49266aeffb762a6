"""What runs inside the server's environment: modules of the standard library alone, found by PYTHONPATH."""
