// Package kube runs Kubernetes API servers for tests. The servers are simulated in the process of the test, unless
// the environment variable KUBE_APISERVER contains the path of a real API server. "make engines" sets this variable.
// A real API server stores its objects in a separate etcd.
package kube

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	client "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/client-go/rest"

	"github.com/go-resilience/resilience/internal/integration/services"
	"github.com/go-resilience/resilience/internal/integration/services/etcd"
	"github.com/go-resilience/resilience/internal/sim/kube"
)

// Tokens of the users of a server. A simulated server accepts every token.
const (
	Admin     = "token-of-admin"
	Candidate = "token-of-candidate" // token of a user who has no rights
)

// A Server is an API server that belongs to one test.
type Server struct {
	Addr string

	gate sync.RWMutex // held while a simulated server is stopped
	cmd  *exec.Cmd    // nil if the server is simulated
}

// Real returns the path of the real API server's program, or "" if servers are simulated.
func Real() string { return os.Getenv("KUBE_APISERVER") }

// New starts a server and waits until it can be used. The server ends with the test.
func New(t testing.TB) *Server {
	t.Helper()
	s := new(Server)
	if Real() == "" {
		api := new(kube.Server)
		server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			s.gate.RLock()
			defer s.gate.RUnlock()
			api.ServeHTTP(w, r)
		}))
		t.Cleanup(server.Close)
		s.Addr = server.Listener.Addr().String()
		return s
	}
	s.start(t)
	return s
}

// start starts a real API server.
func (s *Server) start(t testing.TB) {
	dir := t.TempDir()
	file := func(name string, content []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, content, 0o600))
		return path
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	require.NoError(t, err)
	pair := file("key.pem", pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der}))
	tokens := file("tokens.csv", []byte(Admin+`,admin,admin,"system:masters"`+"\n"+Candidate+",candidate,candidate\n"))
	s.Addr = services.FreeAddr(t)
	_, port, _ := net.SplitHostPort(s.Addr)
	s.cmd = exec.Command(Real(), "--etcd-servers=http://"+etcd.New(t, 1).Addrs[0], "--bind-address=127.0.0.1",
		"--secure-port="+port, "--cert-dir="+dir, "--token-auth-file="+tokens, "--authorization-mode=RBAC",
		"--service-account-issuer=https://kube", "--service-account-key-file="+pair,
		"--service-account-signing-key-file="+pair, "--service-cluster-ip-range=10.0.0.0/24", "--watch-cache=false")
	var output bytes.Buffer
	s.cmd.Stdout, s.cmd.Stderr = &output, &output
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	httpClient, err := rest.HTTPClientFor(Config(s.Addr, Admin))
	require.NoError(t, err)
	require.Eventually(t, func() bool {
		resp, err := httpClient.Get("https://" + s.Addr + "/api/v1/namespaces/default")
		if err == nil {
			_ = resp.Body.Close()
		}
		return err == nil && resp.StatusCode == http.StatusOK
	}, 2*time.Minute, 50*time.Millisecond, &output)
}

// Config returns the configuration of a client that uses the token of a user. addr is the address of the server, or
// of a proxy for the server.
func Config(addr, token string) *rest.Config {
	if Real() == "" {
		return &rest.Config{
			Host: "http://" + addr, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: "application/json"},
		}
	}
	return &rest.Config{Host: "https://" + addr, QPS: -1, BearerToken: token,
		TLSClientConfig: rest.TLSClientConfig{Insecure: true, NextProtos: []string{"http/1.1"}}}
}

// Leases returns a client for leases, with the rights of the administrator.
func Leases(addr string) client.LeaseInterface {
	return client.NewForConfigOrDie(Config(addr, Admin)).Leases("default")
}

// Pause stops the server until Resume is called.
func (s *Server) Pause() {
	if s.cmd == nil {
		s.gate.Lock()
		return
	}
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
}

// Resume continues the server.
func (s *Server) Resume() {
	if s.cmd == nil {
		s.gate.Unlock()
		return
	}
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
}
