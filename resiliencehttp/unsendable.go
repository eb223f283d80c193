package resiliencehttp

import (
	"errors"
	"fmt"
	"net/http"
	"net/url"
)

// unsendable returns why no transport can send req, or nil. net/http checks the same, or sends
// an empty Host, but only after the policies have seen the request, and with errors that have no
// type.
func unsendable(req *http.Request) error {
	switch {
	case req.URL == nil:
		return errors.New("resiliencehttp: the request has no URL")
	case req.Header == nil:
		return errors.New("resiliencehttp: the request has no Header")
	case req.URL.Scheme == "":
		return errors.New("resiliencehttp: the request's URL has no scheme")
	case req.ContentLength > 0 && req.Body == nil:
		return fmt.Errorf("resiliencehttp: the request has a ContentLength of %d and no Body", req.ContentLength)
	}
	if !overHTTP(req.URL) { // the scheme may be registered with Base
		return nil
	}
	if req.URL.Host == "" {
		return errors.New("resiliencehttp: the request's URL has no host")
	}
	if req.Method != "" && !token(req.Method) {
		return fmt.Errorf("resiliencehttp: the request has an invalid method %q", req.Method)
	}
	if hasControl(req.Host) || hasControl(req.URL.Opaque) || hasControl(req.URL.RawQuery) {
		return errors.New("resiliencehttp: the request has a control character in its Host or URL")
	}
	if err := unsendableFields(req.Header); err != nil {
		return err
	}
	for name := range req.Trailer {
		switch http.CanonicalHeaderKey(name) {
		case "Transfer-Encoding", "Trailer", "Content-Length":
			return fmt.Errorf("resiliencehttp: the request cannot have %q in its Trailer", name)
		}
	}
	return unsendableFields(req.Trailer)
}

// unsendableFields returns an error that names a field that cannot be written (RFC 9110,
// sections 5.1 and 5.5), or nil. The error leaves out the value, which may be a secret.
func unsendableFields(fields http.Header) error {
	for name, values := range fields {
		if !token(name) {
			return fmt.Errorf("resiliencehttp: the request has an invalid field name %q", name)
		}
		for _, v := range values {
			for i := range len(v) {
				if control(v[i]) && v[i] != '\t' {
					return fmt.Errorf("resiliencehttp: the request has an invalid value of the field %q", name)
				}
			}
		}
	}
	return nil
}

func overHTTP(u *url.URL) bool { return u.Scheme == "http" || u.Scheme == "https" }

func hasControl(s string) bool {
	for i := range len(s) {
		if control(s[i]) {
			return true
		}
	}
	return false
}

func control(c byte) bool { return c < ' ' || c == 0x7f }

// token reports whether s is a token (RFC 9110, section 5.6.2).
func token(s string) bool {
	for i := range len(s) {
		if !tokenChar(s[i]) {
			return false
		}
	}
	return s != ""
}

func tokenChar(c byte) bool {
	switch {
	case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		return true
	}
	switch c {
	case '!', '#', '$', '%', '&', '\'', '*', '+', '-', '.', '^', '_', '`', '|', '~':
		return true
	}
	return false
}
