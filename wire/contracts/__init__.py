"""One codec per gRPC contract: messages to calls, steps to messages. Pure functions, no engine."""
