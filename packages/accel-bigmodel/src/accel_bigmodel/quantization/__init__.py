"""Models with quantised weights: what is asked for, what runs where, the engines, and the loading."""
