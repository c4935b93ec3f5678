"""What a Qwen2 is: names, configuration, weights and the NumPy reference. Knows no GPU API."""
