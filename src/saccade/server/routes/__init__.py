"""Routes that run the model: OpenAI's, Anthropic's, SGLang's, and routes for vectors and scores."""
