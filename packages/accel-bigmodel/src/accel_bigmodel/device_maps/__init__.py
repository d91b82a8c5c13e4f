"""Device maps: budgets, inference, checks and explanations. Nothing is moved here."""
