"""What two artifacts or two stages differ in, and budgets on it."""
