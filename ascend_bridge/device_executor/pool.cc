#include "pool.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <map>

namespace pagedjax::device {

Pool::Pool(int32_t handle, const Shape& shape, std::unique_ptr<PageStore> store)
    : handle_(handle),
      shape_(shape),
      process_(getpid()),
      store_(std::move(store)),
      row_versions_(static_cast<size_t>(shape.rows()), 0) {}

// Runs a call alone, if the pool can be used; a failing device poisons the pool.
template <class Call>
int32_t Pool::with_store(Call call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  const std::string name = "pool " + text(handle_);
  require(getpid() == process_, name + " was opened before a fork: open another one",
          Kind::kState);
  require(store_ != nullptr, name + " is closed", Kind::kState);
  require(poison_.empty(),
          name + " is poisoned, close it: an earlier call failed, " + poison_, Kind::kState);
  try {
    return call();
  } catch (const Trouble& trouble) {
    if (trouble.kind == Kind::kDevice) poison_ = trouble.message;
    throw;
  }
}

int32_t Pool::write(int32_t version, int32_t layer, const NewTokens& tokens) {
  return with_store([&] {
    require_current(version);
    std::vector<int32_t> rows;
    const auto places = places_of(layer, tokens, &rows);
    const Write write{tokens.k, tokens.v, places.data(), tokens.tokens};
    store_->run(&write, nullptr, Executor{});
    return change(version, rows);
  });
}

int32_t Pool::copy(int32_t version, const int32_t* from, const int32_t* to, int32_t count) {
  return with_store([&] {
    require_current(version);
    require(count <= shape_.max_slots, "the plan has " + text(count) +
                                           " copies, the pool was opened for " +
                                           text(shape_.max_slots));
    std::vector<std::pair<int32_t, int32_t>> pairs;
    std::vector<int32_t> sources, rows;
    for (int32_t i = 0; i < count; ++i) {
      if (row_of(0, from[i]) < 0 || row_of(0, to[i]) < 0 || from[i] == to[i]) continue;
      for (int32_t layer = 0; layer < shape_.num_layers; ++layer) {
        pairs.emplace_back(row_of(layer, from[i]), row_of(layer, to[i]));
        sources.push_back(pairs.back().first);
        rows.push_back(pairs.back().second);
      }
    }
    std::sort(sources.begin(), sources.end());
    std::sort(rows.begin(), rows.end());
    for (size_t i = 0; i < rows.size(); ++i) {
      const int32_t page = rows[i] % shape_.num_pages;
      require(i == 0 || rows[i] != rows[i - 1], "page " + text(page) + " is copied to twice");
      require(!std::binary_search(sources.begin(), sources.end(), rows[i]),
              "page " + text(page) + " is copied both from and to");
    }
    store_->copy(pairs);
    return change(version, rows);
  });
}

int32_t Pool::attend(int32_t version, int32_t layer, Attention attention, const Executor& on) {
  return with_store([&] {
    require_known(version);
    localize(layer, &attention, version);
    store_->run(nullptr, &attention, on);
    return version;
  });
}

int32_t Pool::step(int32_t version, int32_t layer, const NewTokens& tokens,
                   Attention attention, const Executor& on) {
  return with_store([&] {
    require_current(version);
    std::vector<int32_t> rows;
    const auto places = places_of(layer, tokens, &rows);
    const Write write{tokens.k, tokens.v, places.data(), tokens.tokens};
    localize(layer, &attention, version);
    store_->run(&write, &attention, on);
    return change(version, rows);
  });
}

int32_t Pool::read(int32_t version, int32_t layer, const int32_t* pages, int32_t count,
                   void* k, void* v) {
  return with_store([&] {
    require_known(version);
    require_layer(layer);
    std::vector<int32_t> rows;
    for (int32_t i = 0; i < count; ++i) {
      rows.push_back(row_of(layer, pages[i]));
      if (rows.back() >= 0) require_untouched(version, rows.back());
    }
    store_->read(rows, k, v);
    return version;
  });
}

void Pool::load(const std::vector<int32_t>& rows, const void* k, const void* v) {
  with_store([&] {
    store_->load(rows, k, v);
    return version_;
  });
}

Status Pool::status(std::string* message) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  *message = poison_;
  const int32_t state = store_ == nullptr ? 2 : poison_.empty() ? 0 : 1;
  return {state, version_, store_ == nullptr ? 0 : store_->bytes()};
}

void Pool::close() {
  const std::lock_guard<std::mutex> lock(mutex_);
  // The device of a forked process's parent is not this one's to free.
  if (getpid() != process_) (void)store_.release();
  store_.reset();
}

// Only called when the store has done its work: a version that exists is whole.
int32_t Pool::change(int32_t version, const std::vector<int32_t>& rows) {
  version_ = version + 1;
  for (int32_t row : rows) row_versions_[row] = version_;
  return version_;
}

void Pool::require_current(int32_t version) const {
  require(version == version_,
          "stale pool version: this call changes version " + text(version) + " of pool " +
              text(handle_) + ", which is at version " + text(version_),
          Kind::kStale);
  require(version < INT32_MAX, "the versions of the pool are used up", Kind::kState);
}

void Pool::require_known(int32_t version) const {
  require(version >= 0 && version <= version_,
          "unknown pool version " + text(version) + ": pool " + text(handle_) +
              " is at version " + text(version_),
          Kind::kStale);
}

void Pool::require_layer(int32_t layer) const {
  require(layer >= 0 && layer < shape_.num_layers,
          "layer " + text(layer) + " is not in 0 .. " + text(shape_.num_layers - 1));
}

void Pool::require_untouched(int32_t version, int32_t row) const {
  require(row_versions_[row] <= version,
          "stale pool version: this call reads version " + text(version) + " of pool " +
              text(handle_) + ", whose page " + text(row % shape_.num_pages) + " of layer " +
              text(row / shape_.num_pages) + " was rewritten in version " +
              text(row_versions_[row]),
          Kind::kStale);
}

// The place of each token, -1 for none; `rows` receives the rows that are written to.
std::vector<int32_t> Pool::places_of(int32_t layer, const NewTokens& tokens,
                                     std::vector<int32_t>* rows) const {
  require_layer(layer);
  require(tokens.tokens <= shape_.max_tokens,
          "the call writes " + text(tokens.tokens) + " tokens, the pool was opened for " +
              text(shape_.max_tokens));
  std::vector<int32_t> places(tokens.tokens, -1), used;
  for (int32_t t = 0; t < tokens.tokens; ++t) {
    const int32_t row = row_of(layer, tokens.pages[t]), offset = tokens.offsets[t];
    if (row < 0 || offset < 0 || offset >= shape_.page_size) continue;
    places[t] = row * shape_.page_size + offset;
    used.push_back(places[t]);
    rows->push_back(row);
  }
  std::sort(used.begin(), used.end());
  const auto twice = std::adjacent_find(used.begin(), used.end());
  if (twice != used.end()) {
    const int32_t row = *twice / shape_.page_size;
    throw Trouble{Kind::kInvalid, "two tokens are written to offset " +
                                      text(*twice % shape_.page_size) + " of page " +
                                      text(row % shape_.num_pages)};
  }
  return places;
}

// Turns pages of a layer into rows and clips the lengths; checks that what a read of an
// old version sees is still there.
void Pool::localize(int32_t layer, Attention* attention, int32_t read_version) {
  require_layer(layer);
  Attention& a = *attention;
  require(a.slots <= shape_.max_slots && a.pages_per_slot <= shape_.pages_per_slot,
          "the table is [" + text(a.slots) + ", " + text(a.pages_per_slot) +
              "], the pool was opened for [" + text(shape_.max_slots) + ", " +
              text(shape_.pages_per_slot) + "]");
  const int64_t columns = a.pages_per_slot;
  const int32_t none = static_cast<int32_t>(shape_.rows());
  const bool old = read_version != version_;
  table_.assign(a.slots * columns, none);
  lens_.resize(a.slots);
  for (int64_t s = 0; s < a.slots; ++s) {
    const int64_t most = columns * shape_.page_size;
    const int64_t length = std::clamp<int64_t>(a.lens[s], 0, most);
    lens_[s] = static_cast<int32_t>(length);
    const int64_t first = a.window > 0 ? std::max<int64_t>(0, length - a.window) : 0;
    for (int64_t c = first / shape_.page_size; c * shape_.page_size < length; ++c) {
      const int32_t row = row_of(layer, a.table[s * columns + c]);
      if (row < 0) continue;
      if (old) require_untouched(read_version, row);
      table_[s * columns + c] = row;
    }
  }
  a.table = table_.data();
  a.lens = lens_.data();
}

// -1 for a page that does not exist: not the first page of the next layer.
int32_t Pool::row_of(int32_t layer, int32_t page) const {
  return page >= 0 && page < shape_.num_pages ? layer * shape_.num_pages + page : -1;
}

// --- the pools of the process --------------------------------------------------------

namespace {

// Of one array: what addresses of 48 bits reach. A sum of several still fits int64.
constexpr int64_t kMostBytes = int64_t{1} << 48;

// Never destroyed: calls may come as late as the end of the process.
struct Registry {
  std::mutex mutex;
  std::map<int32_t, std::shared_ptr<Pool>> pools;
  int32_t next = 1;
};

Registry& registry() {
  static Registry* const it = new Registry;
  return *it;
}

// Throws unless every count of places and of bytes can be computed with.
void check_sizes(const Shape& s) {
  const int64_t places = product({s.num_layers, s.num_pages, s.page_size});
  require(places <= INT32_MAX,
          text(s.num_layers) + " layers of " + text(s.num_pages) + " pages of " +
              text(s.page_size) + " tokens have more places than int32 can count");
  const int64_t of_token = product({s.kv_heads, s.head_dim, dtype_bytes(s.dtype)});
  const int64_t of_slot = product({s.heads, s.head_dim, dtype_bytes(s.dtype)});
  const std::pair<const char*, int64_t> all[] = {
      {"the keys", product({places, of_token})},
      {"the new keys of a call", product({s.max_tokens, of_token})},
      {"the queries of a call", product({s.max_slots, of_slot})},
      {"the table of a call", product({s.max_slots, s.pages_per_slot, 4})},
      {"the copies of a call", product({s.max_slots, s.num_layers, 4})},
  };
  for (const auto& [what, bytes] : all) {
    require(bytes <= kMostBytes,
            std::string(what) + " take more than " + text(kMostBytes) + " bytes", Kind::kMemory);
  }
}

}  // namespace

int32_t open_pool(const Shape& shape, bool npu, int32_t device, int32_t timeout_ms) {
  check_sizes(shape);
  auto store = npu ? open_npu_store(shape, device, timeout_ms) : open_host_store(shape);
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const int32_t handle = r.next++;
  r.pools[handle] = std::make_shared<Pool>(handle, shape, std::move(store));
  return handle;
}

std::shared_ptr<Pool> find_pool(int32_t handle) {
  Registry& r = registry();
  const std::lock_guard<std::mutex> lock(r.mutex);
  const auto found = r.pools.find(handle);
  if (found != r.pools.end()) return found->second;
  const bool was = handle > 0 && handle < r.next;
  throw Trouble{Kind::kState,
                "pool " + text(handle) + (was ? " is closed" : " was never opened")};
}

void close_pool(int32_t handle) {
  std::shared_ptr<Pool> pool;
  {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    require(handle > 0 && handle < r.next, "pool " + text(handle) + " was never opened",
            Kind::kState);
    const auto found = r.pools.find(handle);
    if (found == r.pools.end()) return;
    pool = found->second;
    r.pools.erase(found);
  }
  pool->close();
}

void close_all() {
  std::map<int32_t, std::shared_ptr<Pool>> all;
  {
    Registry& r = registry();
    const std::lock_guard<std::mutex> lock(r.mutex);
    all.swap(r.pools);
  }
  for (auto& [handle, pool] : all) pool->close();
}

}  // namespace pagedjax::device
