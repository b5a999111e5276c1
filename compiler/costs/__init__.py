"""What a step costs: formulas, this machine's peaks, predictions, and what was measured beside them."""
