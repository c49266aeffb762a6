"""What runs inside the vLLM server's environment, found by PYTHONPATH.

Its modules import each other, the standard library and torch, nothing else of this project.
"""
