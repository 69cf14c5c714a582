"""What each kind of server understands beyond plain OpenAI, and how a request is told to it."""
