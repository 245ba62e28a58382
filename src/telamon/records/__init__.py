"""What was reproduced: checks, their records, and the support table rendered from the records alone."""
