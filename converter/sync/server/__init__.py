"""The embedded server: transformers' models behind OpenAI's API, into which new weights are pushed while it answers."""
