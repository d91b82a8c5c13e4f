"""Device maps: memory budgets, inference, checks and explanations. No tensor is moved here."""
