"""The typed run config: schema, loading, help."""
