"""What an operator runs against a server or a configuration: the worked example, the plan. Starts no engine."""
