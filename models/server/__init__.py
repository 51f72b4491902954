"""A small HTTP server that speaks the completions part of the OpenAI protocol."""
