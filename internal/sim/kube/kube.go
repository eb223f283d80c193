// Package kube simulates an API server of Kubernetes. It stores objects, and rejects an update of an object
// whose resourceVersion is not the current one.
package kube

import (
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"time"
)

// A Server is an [http.Handler] with the verbs get, create, update, delete and deletecollection for
// objects of any kind. The zero Server is empty.
type Server struct {
	mu       sync.Mutex
	revision int64
	objects  map[string]object // the objects by path
	requests map[string]int    // the numbers of requests by method
}

type object = map[string]any

// Requests returns the number of received requests with the given method. If method is empty, Requests
// counts all requests.
func (s *Server) Requests(method string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for m, count := range s.requests {
		if method == "" || m == method {
			n += count
		}
	}
	return n
}

// ServeHTTP implements [http.Handler].
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var given object
	if r.Method == http.MethodPost || r.Method == http.MethodPut {
		if err := json.NewDecoder(r.Body).Decode(&given); err != nil {
			reply(w, http.StatusBadRequest, failure(http.StatusBadRequest, "BadRequest", err.Error()))
			return
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.requests == nil {
		s.requests, s.objects = make(map[string]int), make(map[string]object)
	}
	s.requests[r.Method]++
	code, answer := s.serve(r.Method, strings.TrimSuffix(r.URL.Path, "/"), given)
	reply(w, code, answer)
}

func reply(w http.ResponseWriter, code int, answer object) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(answer)
}

// failure returns the Status object with which an API server reports an error.
func failure(code int, reason, message string) object {
	return object{
		"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": message,
	}
}

var subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`)

var collection = regexp.MustCompile(`/namespaces/[^/]+/[^/]+$`)

// serve returns the status code and the body of the response to a request for an object or a collection.
func (s *Server) serve(method, path string, given object) (int, object) {
	if method == http.MethodPost {
		name, _ := metadata(given)["name"].(string)
		path += "/" + name
	}
	was, name := s.objects[path], path[strings.LastIndex(path, "/")+1:]
	switch {
	case was != nil && method == http.MethodPost:
		return http.StatusConflict, failure(http.StatusConflict, "AlreadyExists", fmt.Sprintf("%q already exists", name))
	case method == http.MethodDelete && (was != nil || collection.MatchString(path)):
		s.revision++
		maps.DeleteFunc(s.objects, func(p string, _ object) bool { return p == path || strings.HasPrefix(p, path+"/") })
		return http.StatusOK, object{"kind": "Status", "apiVersion": "v1", "status": "Success"}
	case was == nil && method != http.MethodPost:
		return http.StatusNotFound, failure(http.StatusNotFound, "NotFound", fmt.Sprintf("%q not found", name))
	}
	switch method {
	case http.MethodGet:
		return http.StatusOK, was
	case http.MethodPost, http.MethodPut:
	default:
		return http.StatusMethodNotAllowed, failure(http.StatusMethodNotAllowed, "MethodNotAllowed", method)
	}
	if why := invalid(name, method, given); why != "" {
		return http.StatusUnprocessableEntity, failure(http.StatusUnprocessableEntity, "Invalid", why)
	}
	now, meta := time.Now().UTC().Format(time.RFC3339), metadata(given)
	if was != nil {
		if meta["resourceVersion"] != metadata(was)["resourceVersion"] {
			return http.StatusConflict, failure(http.StatusConflict, "Conflict", "the object has been modified")
		}
		meta["uid"], meta["creationTimestamp"] = metadata(was)["uid"], metadata(was)["creationTimestamp"]
	} else {
		meta["uid"], meta["creationTimestamp"] = fmt.Sprintf("uid-%d", s.revision), now
	}
	s.revision++
	meta["resourceVersion"] = strconv.FormatInt(s.revision, 10)
	s.objects[path] = given
	if was == nil {
		return http.StatusCreated, given
	}
	return http.StatusOK, given
}

func metadata(o object) object {
	meta, _ := o["metadata"].(object)
	return meta
}

// invalid returns the reason why an API server would reject an object, or "" if it would not.
func invalid(name, method string, o object) string {
	meta := metadata(o)
	version, _ := meta["resourceVersion"].(string)
	spec, _ := o["spec"].(object)
	seconds, hasSeconds := spec["leaseDurationSeconds"].(float64)
	switch {
	case meta["name"] != name || len(name) > 253 || !subdomain.MatchString(name):
		return fmt.Sprintf("metadata.name: %q is invalid", meta["name"])
	case method == http.MethodPut && version == "":
		return "metadata.resourceVersion: must be specified for an update"
	case method == http.MethodPost && version != "":
		return "metadata.resourceVersion: should not be set on objects to be created"
	case hasSeconds && (seconds < 1 || seconds > 1<<31-1):
		return "spec.leaseDurationSeconds: must be greater than 0"
	}
	return ""
}
