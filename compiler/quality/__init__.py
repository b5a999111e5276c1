"""What a compile costs in quality: held-out text, metrics beside the captured model, limits, and the gate that holds to them."""
