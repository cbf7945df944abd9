"""Parts that both HTTP servers share."""
