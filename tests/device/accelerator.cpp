// The simulated accelerator: torch device "sim", two of them, in the memory of the host.
//
//   memory    One file in memory per device, mapped twice. `data_ptr()` lies in a mapping that host code cannot read: a
//             host read of device memory is a segmentation fault. Kernels use the other mapping.
//   streams   A queue with one thread each. Jobs run in order, later than the host submitted them.
//   kernels   The CPU's, run by the thread of the stream. The meta device gives the shapes of results, so the host does
//             not wait, except for operations whose shapes depend on values. Kernels keep no tensor alive: memory that
//             is freed or overwritten too early gives wrong bytes, as on a GPU.
//   tests     Count each wait of the host by thread and reason, and inject errors.
//
// Written for torch 2.13: c10/core/impl/DeviceGuardImplInterface.h, ATen/detail/PrivateUse1HooksInterface.h,
// c10/core/CachingDeviceAllocator.h and ATen/core/CachingHostAllocator.h.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/core/stack.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <pthread.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <torch/library.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <random>
#include <thread>

namespace {

using c10::Device;
using c10::DeviceIndex;
using c10::IValue;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 2;
constexpr size_t kPage = 4096, kGrain = 512, kPool = 8;
using Lock = std::unique_lock<std::mutex>;

// ---------------------------------------------------------------------------------------- counters and injected errors

std::mutex g_mutex;  // guards the tables below
std::map<int64_t, std::map<std::string, int64_t>> g_waits;  // native thread id -> reason -> how many
std::map<std::string, int64_t> g_counts;
struct Failure { int64_t after; bool sticky; };
std::map<std::string, std::deque<Failure>> g_failures;
std::atomic<bool> g_broken{false}, g_forked{false}, g_poison{false};
std::string g_why;
std::atomic<int64_t> g_kernel_us{0}, g_copy_us{0};
std::atomic<bool> g_random{false};
std::atomic<int64_t> g_last_error{0};  // as in CUDA: a call that only returns its error leaves it for the next launch
thread_local bool t_is_worker = false, t_is_relaxed = false;

void count(const std::string& name, int64_t number = 1) { Lock lock(g_mutex); g_counts[name] += number; }

[[noreturn]] void device_error(const std::string& text) {
  throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 999, "sim error: " + text);
}

void break_device(const std::string& why) {
  Lock lock(g_mutex);
  if (!g_broken) g_why = why;
  g_broken = true;
}

bool is_due(const char* kind, bool* sticky) {
  Lock lock(g_mutex);
  auto& failures = g_failures[kind];
  if (failures.empty() || failures.front().after-- > 0) return false;
  *sticky = failures.front().sticky;
  failures.pop_front();
  return true;
}

// Each call into the driver goes through here. A sticky error fails all of them, an injected error fails one.
void enter(const char* kind) {
  TORCH_CHECK(!g_forked, "sim: cannot be used in a forked process");
  bool sticky = false;
  if (g_broken) { std::string why; { Lock lock(g_mutex); why = g_why; } device_error(why + " (sticky)"); }
  if (std::string(kind) == "launch" && g_last_error.exchange(0)) device_error("left by an earlier call");
  if (!is_due(kind, &sticky)) return;
  const std::string why = std::string("injected failure of ") + kind;
  if (sticky) break_device(why);
  device_error(why);
}

void waited(const std::string& reason) {
  Lock lock(g_mutex);
  g_waits[syscall(SYS_gettid)][reason]++;
  g_counts["host_syncs"]++;
}

// -------------------------------------------------------------------------------------------------------------- streams

struct Queue {
  DeviceIndex device;
  int64_t id;
  std::mutex mutex;
  std::condition_variable work, done;
  std::deque<std::pair<std::function<void()>, int64_t>> jobs;
  std::atomic<uint64_t> pushed{0}, finished{0};

  Queue(DeviceIndex device_, int64_t id_) : device(device_), id(id_) { std::thread([this] { serve(); }).detach(); }

  uint64_t push(std::function<void()> job, int64_t delay_us) {
    Lock lock(mutex);
    jobs.emplace_back(std::move(job), delay_us);
    work.notify_one();
    return ++pushed;
  }
  bool reached(uint64_t ticket) const { return finished >= ticket; }
  void wait(uint64_t ticket) {
    Lock lock(mutex);
    done.wait(lock, [&] { return reached(ticket); });
  }
  void serve() {
    t_is_worker = true;
    std::mt19937 random(static_cast<unsigned>(device * 100 + id));
    for (;;) {
      std::function<void()> job;
      int64_t delay;
      {
        Lock lock(mutex);
        work.wait(lock, [&] { return !jobs.empty(); });
        std::tie(job, delay) = std::move(jobs.front());
        jobs.pop_front();
      }
      if (delay && g_random) delay = std::uniform_int_distribution<int64_t>(0, 2 * delay)(random);
      if (delay) std::this_thread::sleep_for(std::chrono::microseconds(delay));
      try {
        bool sticky;
        if (delay >= 0 && is_due("async", &sticky)) break_device("device-side assert");
        if (!g_broken) job();
      } catch (const std::exception& error) {
        break_device(error.what());
      }
      job = nullptr;
      Lock lock(mutex);
      ++finished;
      done.notify_all();
    }
  }
};

struct Graph { bool is_open = false, is_valid = true; std::vector<std::function<void()>> jobs; };
Graph g_graph;  // one capture at a time

Queue& queue_of(DeviceIndex device, int64_t id) {
  static std::mutex mutex;
  static auto* all = new std::map<std::pair<DeviceIndex, int64_t>, Queue*>();
  Lock lock(mutex);
  auto& queue = (*all)[{device, id}];
  if (queue == nullptr) queue = new Queue(device, id);  // never freed: its thread runs until the process ends
  return *queue;
}

thread_local DeviceIndex t_device = 0;
thread_local int64_t t_stream[kDevices] = {0};

DeviceIndex index_of(Device device) { return device.has_index() ? device.index() : t_device; }
Queue& current(Device device) { const auto index = index_of(device); return queue_of(index, t_stream[index]); }
c10::Stream stream_of(DeviceIndex device, int64_t id) {
  return c10::Stream(c10::Stream::UNSAFE, Device(kSim, device), id);
}
Queue& queue_of(const c10::Stream& stream) { return queue_of(stream.device_index(), stream.id()); }

uint64_t launch(Queue& queue, std::function<void()> job, bool is_copy = false) {
  if (g_graph.is_open && !t_is_worker) {
    g_graph.jobs.push_back(std::move(job));  // recorded, not run
    return queue.pushed;
  }
  return queue.push(std::move(job), is_copy ? g_copy_us : g_kernel_us);
}

// Queries and waits fail while a graph is captured and invalidate it, whichever thread they come from (CUDA's capture mode
// "global"), except from a thread that relaxed its mode (cudaThreadExchangeStreamCaptureMode).
void ask(const char* kind) {
  if (g_graph.is_open && !t_is_relaxed) { g_graph.is_valid = false; device_error("not permitted while a stream is capturing"); }
  enter(kind);
}

void host_wait(Queue& queue, uint64_t ticket, const std::string& reason) {
  ask("sync");
  waited(reason);
  queue.wait(ticket);
  enter("after");  // asynchronous errors of the device are raised here
}

// --------------------------------------------------------------------------------------------------------------- memory

struct Arena {
  char *tensors, *kernels;
  size_t size, used = 0;
  Arena() {
    const char* mib = getenv("SIMULATED_ACCELERATOR_MIB");
    size = (mib ? std::stoull(mib) : 1024) << 20;
    const int fd = memfd_create("simulated-accelerator", 0);
    TORCH_CHECK(fd >= 0 && ftruncate(fd, size) == 0, "sim: no memory");
    tensors = static_cast<char*>(mmap(nullptr, size, PROT_NONE, MAP_SHARED, fd, 0));
    kernels = static_cast<char*>(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0));
    TORCH_CHECK(tensors != MAP_FAILED && kernels != MAP_FAILED, "sim: no address space");
    close(fd);
  }
  bool has(const void* p) const { return p >= tensors && p < tensors + size; }
};
Arena& arena(DeviceIndex device) {
  static auto* all = new std::array<Arena, kDevices>();
  return (*all)[device];
}
void* for_kernels(const void* p) {
  if (p == nullptr) return nullptr;
  for (DeviceIndex i = 0; i < kDevices; ++i)
    if (arena(i).has(p)) return arena(i).kernels + (static_cast<const char*>(p) - arena(i).tensors);
  TORCH_CHECK(false, "sim: not memory of the device");
}

struct Block {
  void* p;
  size_t size;
  Queue* owner;
  std::vector<std::pair<Queue*, uint64_t>> uses;  // by other streams; for host memory, by all streams
  bool is_free() {
    while (!uses.empty() && uses.back().first->reached(uses.back().second)) uses.pop_back();
    return uses.empty();
  }
};

void free_device(void* block);
void free_pinned(void* block);

// A freed block is reused at once by the stream that it was allocated on: only the order of that stream protects it.
struct DeviceAllocator final : c10::DeviceAllocator {
  std::mutex mutex;
  std::map<std::pair<Queue*, size_t>, std::vector<Block*>> free;
  std::array<c10::CachingDeviceAllocator::DeviceStats, kDevices> stats;

  at::DataPtr allocate(size_t nbytes) override {
    const Device device(kSim, t_device);
    if (nbytes == 0) return {nullptr, device};
    bool sticky;
    enter("driver");
    if (is_due("alloc", &sticky)) TORCH_CHECK_WITH(OutOfMemoryError, false, "sim: out of memory (injected)");
    const size_t size = (nbytes + kGrain - 1) / kGrain * kGrain;
    Queue* owner = &current(device);
    Lock lock(mutex);
    Block* block = nullptr;
    auto& list = free[{owner, size}];
    for (size_t i = list.size(); i-- > 0 && block == nullptr;)
      if (list[i]->is_free()) { block = list[i]; list.erase(list.begin() + static_cast<int64_t>(i)); }
    if (block == nullptr) {
      auto& own = arena(t_device);
      TORCH_CHECK_WITH(OutOfMemoryError, own.used + size <= own.size, "sim: out of memory");
      block = new Block{own.tensors + own.used, size, owner, {}};
      own.used += size;
    }
    count("allocations");
    stats[t_device].allocated_bytes[0].increase(size);
    return {block->p, block, &free_device, device};
  }
  void give_back(Block* block) {
    if (g_poison)
      block->owner->push([p = for_kernels(block->p), size = block->size] { memset(p, 0xA5, size); }, 0);
    Lock lock(mutex);
    stats[block->owner->device].allocated_bytes[0].decrease(block->size);
    free[{block->owner, block->size}].push_back(block);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device; }
  void copy_data(void* to, const void* from, size_t nbytes) const override {
    launch(current(Device(kSim, t_device)), [a = for_kernels(to), b = for_kernels(from), nbytes] { memcpy(a, b, nbytes); });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(const at::DataPtr& pointer, c10::Stream stream) override {
    Lock lock(mutex);
    auto& queue = queue_of(stream);
    if (auto* block = static_cast<Block*>(pointer.get_context()); block != nullptr && block->owner != &queue)
      block->uses.emplace_back(&queue, queue.pushed.load());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override { return stats[device]; }
  void resetAccumulatedStats(DeviceIndex device) override { stats[device].allocated_bytes[0].reset_accumulated(); }
  void resetPeakStats(DeviceIndex device) override { stats[device].allocated_bytes[0].reset_peak(); }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return {arena(device).size - static_cast<size_t>(stats[device].allocated_bytes[0].current), arena(device).size};
  }
};
DeviceAllocator& allocator() { static auto* one = new DeviceAllocator(); return *one; }
void free_device(void* block) { if (block != nullptr) allocator().give_back(static_cast<Block*>(block)); }

struct HostAllocator final : at::HostAllocator {
  std::mutex mutex;
  std::map<const char*, Block*> blocks;  // in use, by address
  std::vector<Block*> free;
  std::map<const char*, size_t> registered;

  at::DataPtr allocate(size_t nbytes) override {
    enter("pin");
    if (nbytes == 0) return {nullptr, Device(at::kCPU)};
    const size_t size = (nbytes + kPage - 1) / kPage * kPage;
    Lock lock(mutex);
    Block* block = nullptr;
    for (size_t i = 0; i < free.size() && block == nullptr; ++i)
      if (free[i]->size == size && free[i]->is_free()) { block = free[i]; free.erase(free.begin() + static_cast<int64_t>(i)); }
    if (block == nullptr) block = new Block{std::aligned_alloc(kPage, size), size, nullptr, {}};
    blocks[static_cast<char*>(block->p)] = block;
    count("pinned_allocations");
    return {block->p, block, &free_pinned, Device(at::kCPU)};
  }
  void give_back(Block* block) {
    Lock lock(mutex);
    blocks.erase(static_cast<char*>(block->p));
    free.push_back(block);
  }
  Block* find(const void* p) {
    auto after = blocks.upper_bound(static_cast<const char*>(p));
    if (after == blocks.begin()) return nullptr;
    Block* block = std::prev(after)->second;
    return static_cast<const char*>(p) < static_cast<char*>(block->p) + block->size ? block : nullptr;
  }
  bool is_pinned(const void* p) {
    Lock lock(mutex);
    if (find(p) != nullptr) return true;
    auto after = registered.upper_bound(static_cast<const char*>(p));
    return after != registered.begin() && p < std::prev(after)->first + std::prev(after)->second;
  }
  void use(const void* p, Queue& queue, uint64_t ticket) {
    Lock lock(mutex);
    if (Block* block = find(p)) block->uses.emplace_back(&queue, ticket);
  }
  int64_t pin(int64_t address, int64_t nbytes) {  // as cudaHostRegister: 0, or the error
    enter("driver");
    bool sticky;
    count("registered_on_" + std::to_string(t_device));
    if (is_due("register", &sticky)) return g_last_error = 2;
    Lock lock(mutex);
    const char *start = reinterpret_cast<char*>(address), *end = start + nbytes;
    for (const auto& [other, size] : registered)
      if (start < other + size && other < end) return g_last_error = 712;
    registered[start] = static_cast<size_t>(nbytes);
    return 0;
  }
  int64_t unpin(int64_t address) {
    Lock lock(mutex);
    return registered.erase(reinterpret_cast<char*>(address)) != 0U ? 0 : 713;
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned; }
  void copy_data(void* to, const void* from, size_t nbytes) const override { memcpy(to, from, nbytes); }
  bool record_event(void* p, void*, c10::Stream stream) override {
    auto& queue = queue_of(stream);
    use(p, queue, queue.pushed);
    return true;
  }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator& host_allocator() { static auto* one = new HostAllocator(); return *one; }
void free_pinned(void* block) { if (block != nullptr) host_allocator().give_back(static_cast<Block*>(block)); }

// ------------------------------------------------------------------------------------------- devices, streams and events

struct Event {
  Queue* queue;
  uint64_t ticket;
  std::shared_ptr<std::chrono::steady_clock::time_point> at;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device getDevice() const override { return {kSim, t_device}; }
  Device exchangeDevice(Device device) const override { auto old = getDevice(); setDevice(device); return old; }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.index() < kDevices, "sim: there are ", kDevices, " devices");
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override { if (device.has_index()) t_device = device.index(); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(Device device) const override { return stream_of(index_of(device), t_stream[index_of(device)]); }
  c10::Stream getDefaultStream(Device device) const override { return stream_of(index_of(device), 0); }
  c10::Stream getStreamFromGlobalPool(Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(Device device, int) const override {
    static std::atomic<uint64_t> next{0};
    enter("driver");
    return stream_of(index_of(device), static_cast<int64_t>(next++ % kPool + 1));
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    auto old = getStream(stream.device());
    t_stream[stream.device_index()] = stream.id();
    return old;
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool isStreamCapturing(const c10::Stream&) const override { return g_graph.is_open; }
  bool queryStream(const c10::Stream& stream) const override {
    ask("query");
    auto& queue = queue_of(stream);
    return queue.reached(queue.pushed);
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    host_wait(queue_of(stream), queue_of(stream).pushed, "stream");
  }
  void synchronizeDevice(const DeviceIndex device) const override {
    ask("sync");
    waited("device");
    for (int64_t id = 0; id <= static_cast<int64_t>(kPool); ++id)
      queue_of(device, id).wait(queue_of(device, id).pushed);
    enter("after");
  }
  void record(void** event, const c10::Stream& stream, const DeviceIndex, const c10::EventFlag) const override {
    enter("record");
    auto at = std::make_shared<std::chrono::steady_clock::time_point>();
    auto& queue = queue_of(stream);
    const auto ticket = queue.push([at] { *at = std::chrono::steady_clock::now(); }, 0);
    if (*event == nullptr) *event = new Event();
    *static_cast<Event*>(*event) = Event{&queue, ticket, at};
  }
  void block(void* event, const c10::Stream& stream) const override {
    enter("wait");
    if (event == nullptr) return;
    const Event known = *static_cast<Event*>(event);
    auto& queue = queue_of(stream);
    if (known.queue != &queue) queue.push([known] { known.queue->wait(known.ticket); }, 0);
  }
  bool queryEvent(void* event) const override {
    ask("query");
    count("queries");
    return event == nullptr || static_cast<Event*>(event)->queue->reached(static_cast<Event*>(event)->ticket);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const Event known = *static_cast<Event*>(event);
    host_wait(*known.queue, known.ticket, "event");
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  double elapsedTime(void* from, void* to, const DeviceIndex) const override {
    return std::chrono::duration<double, std::milli>(*static_cast<Event*>(to)->at - *static_cast<Event*>(from)->at).count();
  }
  void recordDataPtrOnStream(const c10::DataPtr& pointer, const c10::Stream& stream) const override {
    allocator().recordStream(pointer, stream);
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return kDevices; }
  DeviceIndex getCurrentDevice() const override { return t_device; }
  void setCurrentDevice(DeviceIndex device) const override { Guard().setDevice({kSim, device}); }
  DeviceIndex exchangeDevice(DeviceIndex device) const override { return Guard().exchangeDevice({kSim, device}).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override { return exchangeDevice(device); }
  bool isPinnedPtr(const void* p) const override { return host_allocator().is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator(); }
  Device getDeviceFromPtr(void* p) const override { return {kSim, static_cast<DeviceIndex>(arena(0).has(p) ? 0 : 1)}; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto fresh = allocator().allocate(nbytes);
    const auto size = std::min(nbytes, storage.nbytes());
    if (size != 0) allocator().copy_data(fresh.get(), storage.data(), size);
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    storage.unsafeGetStorageImpl()->set_nbytes(nbytes);
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -------------------------------------------------------------------------------------------------------------- kernels

bool is_sim(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kSim; }

// A CPU tensor of the same memory. It keeps nothing alive, as a kernel of a GPU does not.
at::Tensor alias(const at::Tensor& tensor) {
  void* p = tensor.unsafeGetTensorImpl()->mutable_data();
  auto same = at::for_blob(is_sim(tensor) && tensor.numel() ? for_kernels(p) : p, tensor.sizes())
                  .strides(tensor.strides())
                  .options(tensor.options().device(at::kCPU).requires_grad(false))
                  .target_device(Device(at::kCPU))
                  .make_tensor();
  same._set_conj(tensor.is_conj());
  same._set_neg(tensor.is_neg());
  return same;
}

at::Tensor to_kernel(const at::Tensor& tensor) {
  if (!tensor.defined()) return tensor;
  if (is_sim(tensor)) return alias(tensor);
  auto own = tensor.detach().clone();  // read at launch, as the arguments of a kernel
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) own.unsafeGetTensorImpl()->set_wrapped_number(true);
  return own;
}

at::Tensor to_meta(const at::Tensor& tensor) {
  return is_sim(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)) : tensor;
}

IValue changed(const IValue& value, Device device, const std::function<at::Tensor(const at::Tensor&)>& change) {
  if (value.isTensor()) return change(value.toTensor());
  if (value.isDevice() && value.toDevice().type() == kSim) return device;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& item : value.toTensorVector()) list.push_back(change(item));
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& item : value.toOptionalTensorVector())
      list.push_back(item.has_value() ? std::optional<at::Tensor>(change(*item)) : std::nullopt);
    return list;
  }
  return value;
}

std::optional<Device> device_of(const std::vector<IValue>& args) {
  std::optional<Device> found;
  for (const auto& arg : args)
    changed(arg, Device(at::kCPU), [&](const at::Tensor& item) { if (is_sim(item)) found = item.device(); return item; });
  for (const auto& arg : args)
    if (!found && arg.isDevice() && arg.toDevice().type() == kSim) found = Device(kSim, index_of(arg.toDevice()));
  return found;
}

void call(const c10::OperatorHandle& op, torch::jit::Stack& stack) {
  at::AutoDispatchBelowAutograd below;
  op.callBoxed(&stack);
}

at::Tensor new_like(const at::Tensor& tensor, Device device) {
  return tensor.defined() ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(device)) : tensor;
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format);

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto num_args = schema.arguments().size();
  const std::vector<IValue> args(stack->end() - static_cast<int64_t>(num_args), stack->end());
  const auto device = device_of(args).value_or(Device(kSim, t_device));
  std::vector<int64_t> source;  // for each result: the argument that it aliases, or -1
  bool is_plain = true, may_resize = false;
  const auto is_written = [&](size_t i) {
    const auto* info = schema.arguments()[i].alias_info();
    return info != nullptr && info->isWrite() && args[i].isTensor() && is_sim(args[i].toTensor());
  };
  for (size_t i = 0; i < num_args; ++i) may_resize |= is_written(i) && args[i].toTensor().numel() == 0;
  for (const auto& result : schema.returns()) {
    source.push_back(-1);
    if (result.alias_info() == nullptr) { is_plain &= result.type()->kind() == c10::TypeKind::TensorType; continue; }
    TORCH_CHECK_NOT_IMPLEMENTED(result.alias_info()->isWrite(), "sim: the view ", op.operator_name(), " is not supported");
    for (size_t i = 0; i < num_args; ++i)
      if (const auto* info = schema.arguments()[i].alias_info(); info && info->beforeSets() == result.alias_info()->beforeSets())
        source.back() = static_cast<int64_t>(i);
  }
  const bool has_new = std::count(source.begin(), source.end(), -1) != 0;
  enter("launch");
  auto& queue = current(device);
  std::vector<at::Tensor> results(source.size());
  if ((has_new && is_plain) || may_resize) {
    torch::jit::Stack meta;
    for (const auto& arg : args) meta.push_back(changed(arg, Device(at::kMeta), to_meta));
    try {
      const auto metas = meta;
      call(op, meta);
      c10::OptionalDeviceGuard guard(device);
      for (size_t i = 0; i < num_args; ++i)  // out= tensors that are too small
        if (is_written(i) && metas[i].toTensor().sizes() != args[i].toTensor().sizes())
          resize_(args[i].toTensor(), metas[i].toTensor().sizes(), std::nullopt);
      for (size_t i = 0; i < source.size(); ++i)
        if (source[i] < 0) results[i] = new_like(meta[i].toTensor(), device);
    } catch (const c10::OutOfMemoryError&) {
      throw;
    } catch (const std::exception&) {
      is_plain = false;  // the shape depends on values, or the meta device does not support the operation
    }
  }
  torch::jit::Stack inputs;
  for (const auto& arg : args) inputs.push_back(changed(arg, Device(at::kCPU), to_kernel));
  std::vector<IValue> outputs(source.size());
  if (is_plain || !has_new) {
    count("launches");
    std::vector<at::Tensor> targets;
    for (const auto& result : results) targets.push_back(result.defined() ? alias(result) : result);
    launch(queue, [op, inputs, targets]() mutable {
      at::NoGradGuard no_grad;
      call(op, inputs);
      for (size_t i = 0; i < targets.size(); ++i)
        if (targets[i].defined()) targets[i].copy_(inputs[i].toTensor());
    });
    for (size_t i = 0; i < source.size(); ++i) outputs[i] = results[i];
  } else {
    host_wait(queue, queue.pushed, "values of " + toString(op.operator_name()));
    call(op, inputs);
    c10::OptionalDeviceGuard guard(device);
    const auto move = [&](const at::Tensor& item) {
      return item.defined() ? item.to(device, item.scalar_type(), /*non_blocking=*/true) : item;
    };
    for (size_t i = 0; i < source.size(); ++i) outputs[i] = changed(inputs[i], device, move);
  }
  torch::jit::drop(*stack, num_args);
  for (size_t i = 0; i < source.size(); ++i) stack->push_back(source[i] < 0 ? outputs[i] : args[source[i]]);
}

void copy_between(const at::Tensor& to, const at::Tensor& from) {
  Queue &a = current(from.device()), &b = current(to.device());
  if (&a != &b) a.push([&b, ticket = b.pushed.load()] { b.wait(ticket); }, 0);
  const auto ticket = launch(a, [to = alias(to), from = alias(from)] { to.copy_(from); });
  if (&a != &b) b.push([&a, ticket] { a.wait(ticket); }, 0);
}

at::Tensor& copy_(at::Tensor& to, const at::Tensor& from_, bool non_blocking) {
  if (to.numel() == 0) return to;
  auto from = from_.sizes() == to.sizes() ? from_ : from_.expand(to.sizes());
  if (is_sim(to) && is_sim(from)) {
    enter("launch");
    copy_between(to, from);
    return to;
  }
  enter("copy");
  const bool is_down = is_sim(from);
  const auto& host = is_down ? to : from;
  auto& queue = current(is_down ? from.device() : to.device());
  const bool is_pinned = host_allocator().is_pinned(host.unsafeGetTensorImpl()->data());
  // Pageable memory is copied to a buffer of the driver before the call returns.
  auto source = is_down || is_pinned ? alias(from) : from.detach().clone();
  const auto ticket = launch(queue, [target = alias(to), source] { target.copy_(source); }, true);
  count(is_down ? "copied_down" : "copied_up", static_cast<int64_t>(to.nbytes()));
  if (is_pinned) host_allocator().use(host.unsafeGetTensorImpl()->data(), queue, ticket);
  if (!non_blocking || (is_down && !is_pinned)) host_wait(queue, ticket, is_down ? "copy to the host" : "copy from the host");
  return to;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  auto target = to;
  return copy_(target, from, non_blocking);
}

at::Scalar local_scalar_dense(const at::Tensor& tensor) {
  auto& queue = current(tensor.device());
  host_wait(queue, queue.pushed, "item");
  return alias(tensor).item();
}

at::Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                 std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(size, &allocator(), keys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  constexpr c10::DispatchKeySet keys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_strided_generic(size, stride, &allocator(), keys, c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat> format) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(size);
  if (format.has_value() && *format != at::MemoryFormat::Preserve) impl->empty_tensor_restride(*format);
  const size_t needed = static_cast<size_t>(impl->numel() + impl->storage_offset()) * impl->itemsize();
  c10::OptionalDeviceGuard guard(self.device());
  if (self.storage().nbytes() < needed) Hooks().resizePrivateUse1Bytes(self.storage(), needed);
  return self;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(storage));
  impl->set_storage_offset(offset);
  if (stride.empty()) impl->set_sizes_contiguous(size); else impl->set_sizes_and_strides(size, stride);
  return self;
}
at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto size = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {size}, {});
}
at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& other) {
  return set_storage(self, other.storage(), other.storage_offset(), other.sizes(), other.strides());
}
void record_stream(at::Tensor& self, c10::Stream stream) { allocator().recordStream(self.storage().data_ptr(), stream); }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  // torch would decompose these into operations that round differently from the CPU's kernels.
  m.impl("native_layer_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("native_group_norm", torch::CppFunction::makeFromBoxedFunction<&fallback>());
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("record_stream", record_stream);
}

bool g_is_registered = [] {
  c10::SetAllocator(kSim, &allocator());
  at::setHostAllocator(kSim, &host_allocator());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  pthread_atfork(nullptr, nullptr, [] { g_forked = true; });
  return true;
}();

void drain() {  // between tests: waits, counts nothing, raises nothing
  for (DeviceIndex device = 0; device < kDevices; ++device)
    for (int64_t id = 0; id <= static_cast<int64_t>(kPool); ++id) queue_of(device, id).wait(queue_of(device, id).pushed);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto free = pybind11::call_guard<pybind11::gil_scoped_release>();
  m.def("set_delay", [](int64_t kernel_us, int64_t copy_us, bool is_random) {
    g_kernel_us = kernel_us; g_copy_us = copy_us; g_random = is_random;
  });
  m.def("poison", [](bool is_on) { g_poison = is_on; });
  m.def("counters", [] { Lock lock(g_mutex); return g_counts; });
  m.def("waits", [] { Lock lock(g_mutex); return g_waits; });
  m.def("reset_counters", [] { Lock lock(g_mutex); g_counts.clear(); g_waits.clear(); });
  m.def("fail_next", [](const std::string& kind, int64_t after, bool sticky) {
    Lock lock(g_mutex); g_failures[kind].push_back({after, sticky});
  });
  m.def("reset_errors", [] { Lock lock(g_mutex); g_failures.clear(); g_broken = false; });
  m.def("is_broken", [] { return g_broken.load(); });
  m.def("host_register", [](int64_t p, int64_t nbytes) { return host_allocator().pin(p, nbytes); });
  m.def("host_unregister", [](int64_t p) { return host_allocator().unpin(p); });
  m.def("get_last_error", [] { return g_last_error.exchange(0); });
  m.def("registered_nbytes", [] {
    size_t sum = 0;
    for (const auto& [p, size] : host_allocator().registered) sum += size;
    return sum;
  });
  m.def("relax", [] { t_is_relaxed = true; });
  m.def("begin_graph", [] { g_graph = Graph{}; g_graph.is_open = true; });
  m.def("end_graph", [] { g_graph.is_open = false; return g_graph.is_valid; });
  m.def("replay", [] { for (const auto& job : g_graph.jobs) launch(current(Device(kSim, t_device)), job); });
  m.def("current_device", [] { return static_cast<int>(t_device); });
  m.def("set_device", [](int device) { Guard().setDevice({kSim, static_cast<DeviceIndex>(device)}); });
  m.def("is_forked", [] { return g_forked.load(); });
  m.def("drain", &drain, free);
}
