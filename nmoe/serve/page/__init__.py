"""The chat page at `/`: files that a browser loads. A text becomes HTML through DOMPurify alone."""

from pathlib import Path

from nmoe.web import Page

PAGE = Page(Path(__file__).parent, "dompurify")
