"""What travels: engine-neutral calls and steps, and one codec per gRPC contract."""
