"""Fine-tuning, the meta-gradient recursion, and finite differences."""
