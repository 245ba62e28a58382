"""Training: state, loss, step, optimizer, and the loop that runs them."""
