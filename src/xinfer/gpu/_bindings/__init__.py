"""Generated declarations of native interfaces."""
