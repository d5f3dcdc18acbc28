"""The configuration: a frozen schema and its YAML. Imports neither Ray nor vLLM."""
