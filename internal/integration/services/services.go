// Package services finds or starts the servers that tests use. If a server cannot be reached, the test is skipped and
// logs the reason. With REQUIRE_SERVICES=1, which CI sets, the test fails instead.
package services

import (
	"bytes"
	"context"
	"crypto/sha512"
	"database/sql"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
)

// patience is the maximum time that a server may take to accept a connection. If a server is not running, the
// connection is refused immediately. On a busy machine, a server has taken 12 seconds.
const patience = 2 * time.Minute

// Redis returns the address of a running Redis server. The address is in REDIS_ADDR; the default is 127.0.0.1:6379.
// All tests share this server, so each test must use its own key prefix.
func Redis(t testing.TB) string {
	t.Helper()
	addr := env("REDIS_ADDR", "127.0.0.1:6379")
	if err := ping(addr); err != nil {
		missing(t, "Redis at "+addr, err)
	}
	return addr
}

// Postgres returns the DSN of a running PostgreSQL server. The DSN is in POSTGRES_DSN; the default is
// postgres://postgres@127.0.0.1:5432/postgres. All tests share this server, so each test must use its own schema.
func Postgres(t testing.TB) string {
	t.Helper()
	dsn := env("POSTGRES_DSN", "postgres://postgres@127.0.0.1:5432/postgres")
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		missing(t, "PostgreSQL at POSTGRES_DSN", err)
	}
	_ = conn.Close(ctx)
	return dsn
}

// MySQL returns the DSN of a running MySQL or MariaDB server. The DSN is in MYSQL_DSN; the default is
// root@tcp(127.0.0.1:3306)/. All tests share this server, so each test must use its own database.
func MySQL(t testing.TB) string {
	t.Helper()
	dsn := env("MYSQL_DSN", "root@tcp(127.0.0.1:3306)/")
	db, err := sql.Open("mysql", dsn)
	if err == nil {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err = db.PingContext(ctx)
		_ = db.Close()
	}
	if err != nil {
		missing(t, "MySQL at MYSQL_DSN", err)
	}
	return dsn
}

// Chromium returns the path of Chromium or Chrome. The path is in CHROMIUM; by default, a program in PATH is used.
func Chromium(t testing.TB) string {
	t.Helper()
	var path string
	var err error
	for _, name := range []string{os.Getenv("CHROMIUM"), "chromium", "chromium-browser", "google-chrome"} {
		if name == "" {
			continue
		}
		if path, err = exec.LookPath(name); err == nil {
			return path
		}
	}
	missing(t, "the program chromium", err)
	return ""
}

// NPM downloads a package from the npm registry and returns its folder. The test fails unless the tarball has the
// given integrity, in the format of a package-lock.json.
func NPM(t testing.TB, name, version, integrity string) string {
	t.Helper()
	npm, err := exec.LookPath("npm")
	if err != nil {
		missing(t, "the program npm", err)
	}
	dir := t.TempDir()
	tarball := fmt.Sprintf("%s-%s.tgz", name, version)
	cmd := exec.Command(npm, "pack", "--silent", name+"@"+version)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		missing(t, "the npm registry", fmt.Errorf("%w: %s", err, out))
	}
	data, err := os.ReadFile(filepath.Join(dir, tarball))
	if err != nil {
		t.Fatal(err)
	}
	sum := sha512.Sum512(data)
	if got := "sha512-" + base64.StdEncoding.EncodeToString(sum[:]); got != integrity {
		t.Fatalf("%s has the integrity %s", tarball, got)
	}
	if out, err := exec.Command("tar", "-xzf", filepath.Join(dir, tarball), "-C", dir).CombinedOutput(); err != nil {
		t.Fatalf("tar: %v: %s", err, out)
	}
	return filepath.Join(dir, "package")
}

// A RedisServer is a Redis server that belongs to one test. The test may kill, pause and restart it at the same
// address. It stores no data on disk.
type RedisServer struct {
	Addr string

	t        testing.TB
	dir      string
	args     []string                // additional arguments
	sentinel string                  // the configuration file of a Sentinel; empty for a Redis
	ready    func(addr string) error // returns nil if the server can be used
	mu       sync.Mutex
	cmd      *exec.Cmd
}

// NewRedis starts a Redis server, with additional arguments, on a free port of the loopback interface. The server
// ends with the test.
func NewRedis(t testing.TB, args ...string) *RedisServer {
	t.Helper()
	needRedisServer(t)
	s := &RedisServer{Addr: FreeAddr(t), t: t, dir: t.TempDir(), args: args, ready: ping}
	t.Cleanup(s.Kill)
	s.Start()
	return s
}

// FreeAddr returns a free address of the loopback interface. Its port is below the ports that the kernel uses for
// outgoing connections, so that it is still free when a server uses it.
func FreeAddr(t testing.TB) string {
	t.Helper()
	for try := 0; ; try++ {
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(11000+rand.N(20000))))
		if err == nil {
			defer l.Close()
			return l.Addr().String()
		}
		if try == 1000 {
			t.Fatalf("no free port: %v", err)
		}
	}
}

func needRedisServer(t testing.TB) {
	t.Helper()
	if _, err := exec.LookPath("redis-server"); err != nil {
		missing(t, "the program redis-server", err)
	}
}

// Start starts the server after Kill and waits until it can be used.
func (s *RedisServer) Start() {
	s.t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	s.launch()
	s.await()
}

// launch starts the server but does not wait for it. The caller of launch or await holds s.mu.
func (s *RedisServer) launch() {
	s.t.Helper()
	_, port, _ := net.SplitHostPort(s.Addr)
	args := append([]string{"--bind", "127.0.0.1", "--port", port,
		"--save", "", "--appendonly", "no", "--dir", s.dir}, s.args...)
	if s.sentinel != "" {
		args = []string{s.sentinel, "--sentinel"}
	}
	s.cmd = exec.Command("redis-server", args...)
	out := new(bytes.Buffer)
	s.cmd.Stdout, s.cmd.Stderr = out, out
	if err := s.cmd.Start(); err != nil {
		s.cmd = nil
		s.t.Fatalf("redis-server: %v", err)
	}
}

// await waits until the server can be used.
func (s *RedisServer) await() {
	s.t.Helper()
	var err error
	for deadline := time.Now().Add(patience); time.Now().Before(deadline); time.Sleep(25 * time.Millisecond) {
		if err = s.ready(s.Addr); err == nil {
			return
		}
	}
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
	out := s.cmd.Stdout
	s.cmd = nil
	s.t.Fatalf("redis-server at %s cannot be used: %v\n%s", s.Addr, err, out)
}

// Kill kills the server with SIGKILL. All its data is lost.
func (s *RedisServer) Kill() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
		s.cmd = nil
	}
}

// Pause stops the server with SIGSTOP until Resume is called. Its connections stay open.
func (s *RedisServer) Pause() { s.signal(syscall.SIGSTOP) }

// Resume continues a paused server.
func (s *RedisServer) Resume() { s.signal(syscall.SIGCONT) }

func (s *RedisServer) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		_ = s.cmd.Process.Signal(sig)
	}
}

func ping(addr string) error {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c := redis.NewClient(&redis.Options{Addr: addr, MaxRetries: -1, DialerRetries: 1})
	defer c.Close()
	return c.Ping(ctx).Err()
}

func missing(t testing.TB, what string, err error) {
	t.Helper()
	message := fmt.Sprintf("%s cannot be reached: %v", what, err)
	if must, _ := strconv.ParseBool(os.Getenv("REQUIRE_SERVICES")); must {
		t.Fatal(message)
	}
	t.Skip(message)
}

func env(name, otherwise string) string {
	if v := os.Getenv(name); v != "" {
		return v
	}
	return otherwise
}
