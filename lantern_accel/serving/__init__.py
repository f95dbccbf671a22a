"""An image service for one device: OpenAI's images API over slots of a batch (extra ``serve``)."""
