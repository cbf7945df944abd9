"""Long studies: matrices of many runs that take from half an hour to many hours."""
