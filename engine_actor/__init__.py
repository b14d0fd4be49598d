"""The step loop and the Ray actor around it."""
